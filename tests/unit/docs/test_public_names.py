"""What each package says it exports is there, and documented."""

import importlib

import pytest


@pytest.mark.parametrize("package", ["dflash_engine", "ingest"])
def test_each_exported_name_exists_and_says_what_it_is(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name).__doc__, name


@pytest.mark.parametrize("package", ["dflash_engine", "ingest"])
def test_a_name_that_is_not_there_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="no_such_name"):
        importlib.import_module(package).no_such_name  # noqa: B018
