"""The command line: each file parses one family of commands and prints what the rooms yield."""
