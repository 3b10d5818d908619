"""Messages: what ranks send each other for each launch.

A `KVExchange` and the spans of a rank go in; a `LaunchExchange` comes out. It imports
`ringfa3.planning`.
"""
