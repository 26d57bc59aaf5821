"""`python -m mlx_spec`, the same as `mlx-spec`."""

from mlx_spec.cli import main

if __name__ == "__main__":
    main()
