"""The front door: retrieval, prompt, answer, HTTP, pages, command line."""

__version__ = "0.1.0"
