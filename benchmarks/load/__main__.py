"""Runs `python -m benchmarks.load`; client processes import this module too and need nothing of it."""

if __name__ == "__main__":
    from benchmarks.load.command import main

    main()
