"""The ``flux`` command, as ``python -m flux``."""

from controller.operate.cli import main

if __name__ == "__main__":
    main()
