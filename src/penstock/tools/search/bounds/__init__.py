"""Times that no order can beat, which tell a search how far it still could get."""
