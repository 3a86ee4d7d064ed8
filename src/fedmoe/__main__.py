"""`python -m fedmoe` is `fedmoe`."""

from fedmoe.cli import main

if __name__ == "__main__":
    main()
