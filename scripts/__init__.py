"""The command line: one file a command, each with `main()`; rooms for the commands that have
parts.
"""
