"""Ports of this machine for a job whose processes are all started here."""

import random
import socket

from jaxfound.resources.launch.join import NUM_PORTS

# Below the ports that systems give to outgoing connections, so that none of them is in the way.
FIRST, END = 20000, 32000


def free_ports() -> int:
    """Return the lowest of NUM_PORTS ports in a row, one for each attempt, that nobody has now.

    It is a multiple of their number: two jobs of one machine have all ports in common or none, and
    no later attempt of one comes to a port of the other.
    """
    while True:
        base = random.randrange(FIRST, END, NUM_PORTS)
        if all(_is_free(base + attempt) for attempt in range(NUM_PORTS)):
            return base


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True
