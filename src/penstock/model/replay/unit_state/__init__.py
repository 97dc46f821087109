"""What units keep from one call to the next, and who else reads it."""
