"""The program: `mlx-spec`, and `python -m mlx_spec`. Imports nothing before Ctrl-C is answered without a traceback."""

import sys


def main() -> None:
    try:
        from mlx_spec.cli.main import main as command_line

        command_line()
    except KeyboardInterrupt:  # while the command line is imported; afterwards it sees to that itself
        sys.exit(130)


if __name__ == "__main__":
    main()
