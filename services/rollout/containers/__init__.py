"""Containers of sessions on this node: their names, their end, and the reaper.

The containers are other libraries'. Each carries the name of its session as a label, so that what a kill
leaves behind can be told from what is in use.
"""
