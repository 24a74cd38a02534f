"""`python -m harness`: the command line without its entry point."""

from harness.commands.app import main

main()
