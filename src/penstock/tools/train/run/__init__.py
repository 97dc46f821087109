"""What a run leaves behind and shows: its folder, its metrics, its line of progress."""
