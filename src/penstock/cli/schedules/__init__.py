"""Commands that look at schedules: draw, prove, price, compare, search."""
