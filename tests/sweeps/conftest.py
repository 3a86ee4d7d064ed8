from stored_results import make_results  # noqa: F401 (a fixture)
