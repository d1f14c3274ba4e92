"""The fixtures of the tests of the core."""

from tests.conftest import *  # noqa: F403
