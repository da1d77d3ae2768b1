"""Helpers of the tests: small models, engines, servers, files and drivers of the user interface."""
