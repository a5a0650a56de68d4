"""The notebook user's face of jaxfound; filled in as the rooms are."""
