"""A client of the server over a scripted engine, which must be idle after every test."""

import pytest
from starlette.testclient import TestClient

from tests.serving.scripted import scripted_app


@pytest.fixture(scope="module")
def there():
    """The scripted engine and a client of its server."""
    front, app = scripted_app()
    with TestClient(app) as client:
        yield front, client


@pytest.fixture
def client(there):
    front, client = there
    yield client
    assert not front.open
