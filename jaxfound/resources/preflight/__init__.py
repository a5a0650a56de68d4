"""Checks made before anything that costs much: one file a family, one verdict a check.

No check but the burn-in starts a JAX backend. What several hosts must agree about is gathered by
`examine` and judged by a function of the facts alone.
"""

from jaxfound.resources.preflight.check import Check, Verdict
from jaxfound.resources.preflight.host import check_host

__all__ = ["Check", "Verdict", "check_host"]
