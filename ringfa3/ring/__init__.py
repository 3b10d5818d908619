"""One attention call over a CP group: checks, transports, hops.

In: local q, k, v and a context plan. Out: (out, LSE), or gradients, of the local tokens.
Imports `agreement`, `masks`, `planning`, `quantisation`, `kernels`, `host`, `symmetric`,
`pass_interface`, `validation`, `keywords`, `custom_op`, `attention_op`, `straight_through`,
`numa`, `threads`, `errors`.
"""
