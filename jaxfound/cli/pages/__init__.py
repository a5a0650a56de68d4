"""Pages that the command line writes: markup, number formats, charts, and what a run recorded."""
