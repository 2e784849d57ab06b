"""``python -m flux`` is the ``flux`` command."""

from controller.operate.cli import main

if __name__ == "__main__":
    main()
