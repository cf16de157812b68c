"""Scripts that run in other packages' environments. None of them imports this package."""
