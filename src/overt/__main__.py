"""`python -m overt`, which also runs from the source tree."""

from overt.cli import main

main()
