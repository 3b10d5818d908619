"""PTX of small kernels, for tests of the emulator."""

from __future__ import annotations

KERNEL = """
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 raw[];
.visible .entry kernel({parameters})
{{
  .reg .pred %p<9>;
  .reg .b16 %h<9>;
  .reg .b32 %r<99>;
  .reg .f32 %f<99>;
  .reg .b64 %d<19>;
{body}
  ret;
}}
"""


def kernel(body: str, parameters: int = 1) -> str:
    """PTX of a kernel whose parameters are 64-bit pointers; %d0, %d1, ... hold them."""
    declared = ", ".join(f".param .u64 kernel_param_{n}" for n in range(parameters))
    loads = [f"ld.param.u64 %d{n}, [kernel_param_{n}];" for n in range(parameters)]
    return KERNEL.format(parameters=declared, body="\n".join((*loads, body)))
