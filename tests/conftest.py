"""Fixtures that several folders use."""

pytest_plugins = ["tests.support.s3", "tests.support.seaweed", "tests.support.proxy", "tests.support.storage_bench"]
