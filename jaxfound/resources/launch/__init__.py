"""Starting the processes of a job, watching them, and starting them again."""

from jaxfound.resources.launch.agent import Agent, Told
from jaxfound.resources.launch.exits import Exit
from jaxfound.resources.launch.place import Place

__all__ = ["Agent", "Exit", "Place", "Told"]
