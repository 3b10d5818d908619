"""The command line `python -m ringfa3.build`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ringfa3.build.compile import build_all, check_library, default_jobs
from ringfa3.build.cutlass import include_folder
from ringfa3.build.host_library import ensure_host_library
from ringfa3.build.units import select_units
from ringfa3.errors import BuildError


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m ringfa3.build", description=main.__doc__)
    made.add_argument(
        "--units",
        nargs="+",
        default=["all"],
        metavar="UNIT",
        help="for example d128-bf16; default all",
    )
    made.add_argument(
        "-j", "--jobs", type=int, help="compilers at once; default: by cores and free memory"
    )
    made.add_argument("--check", action="store_true", help="check the machine code of the units")
    made.add_argument("--headers", action="store_true", help="fetch CUTLASS's headers only")
    made.add_argument(
        "--host", action="store_true", help="compile the C++ launcher for this PyTorch, no kernel"
    )
    made.add_argument(
        "--wheel",
        nargs="?",
        const=Path("dist"),
        type=Path,
        metavar="FOLDER",
        help="write a wheel with the compiled units; default dist",
    )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles the CUDA kernels. Exit code 1 if a unit does not compile or fails its check."""
    options = parser().parse_args(arguments)
    if options.jobs is not None and options.jobs < 1:
        parser().error(f"-j {options.jobs}: it must be at least 1")
    try:
        if options.headers:
            print(include_folder())
            return
        if options.host:
            print(ensure_host_library())
            return
        units = select_units(options.units)
        build_all(units, options.jobs or default_jobs())
        faults = {unit: check_library(unit) for unit in units} if options.check else {}
        if options.wheel and not any(faults.values()):
            from ringfa3.build.wheel import build_wheel

            print(build_wheel(units, options.wheel))
    except ModuleNotFoundError as error:  # of hatchling
        sys.exit(f"ringfa3: {error}: pip install 'ringfa3[wheel]'")
    except (BuildError, OSError) as error:
        sys.exit(f"ringfa3: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    for unit, messages in faults.items():
        print(f"{unit.name}: " + ("; ".join(messages) or "machine code is as expected"))
    sys.exit(1 if any(faults.values()) else 0)


if __name__ == "__main__":
    main()
