"""`python -m ringfa3.build`, see `compile.main`."""

from ringfa3.build.compile import main

main()
