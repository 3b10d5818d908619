"""The NVLink transport: copy engines pull K/V from peers' memory while kernels run.

In: a context plan and local K/V. Out: calls of `attend`, one per hop or one over gathered K/V.
Imports `planning`, `kernels`, `schedules`, `host`, `pass_interface`, `attention_op`, `numa`,
`threads`, `validation` and `errors`.
"""
