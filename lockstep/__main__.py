"""`python -m lockstep`"""

from lockstep.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
