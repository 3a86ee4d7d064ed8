import pytest

from deployment.wards import trained


@pytest.fixture(scope="package")
def wards(tmp_path_factory):
    """A finished run on a table."""
    return trained(tmp_path_factory.mktemp("wards") / "run")
