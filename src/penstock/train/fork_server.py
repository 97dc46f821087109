"""Loaded first of all by the server that ranks are forked from, and by nothing else: it ends with the launcher.

A fork server that saw the launcher go would still clean up for a second or more, and ranks that cannot see it
themselves (stopped, or deep in a call that holds Python's lock) end only with the server.
"""

from __future__ import annotations

from penstock.train.parent import die_with_parent

die_with_parent()
