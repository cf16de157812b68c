"""The engine as other frameworks' model classes. Import the submodule of the one you use."""
