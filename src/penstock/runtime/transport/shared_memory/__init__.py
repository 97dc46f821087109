"""Ranks are processes of one host: messages travel through shared memory."""
