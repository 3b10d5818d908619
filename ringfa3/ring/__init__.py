"""One attention call over a CP group: checks, agreement, transports, hops.

In: local q, k, v and a context plan. Out: (out, LSE), or gradients, of the local tokens.
Imports `masks`, `planning`, `quantisation`, `kernels`, `schedules`, `host`, `symmetric`,
`pass_interface`, `validation`, `keywords`, `custom_op`, `attention_op`, `straight_through`,
`tensor_cache`, `threads`, `errors`.
"""
