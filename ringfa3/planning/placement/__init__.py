"""Placement: which rank gets which tokens of a document, and which ranks share a host.

Documents, tokens of each rank, hosts, and the work of a chunk go in; chunks come out. It imports
`ringfa3.validation`.
"""
