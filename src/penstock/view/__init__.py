"""Looking at schedules, stages and runs: reads values, changes nothing."""
