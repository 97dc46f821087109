"""From the order in which ranks compute to the program that they run."""
