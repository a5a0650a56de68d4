"""`python -m jaxfound.resources.checkpoint`: the uploader of a host, as a trainer starts it."""

import sys

from jaxfound.resources.checkpoint.uploader import main

if __name__ == "__main__":
    sys.exit(main())
