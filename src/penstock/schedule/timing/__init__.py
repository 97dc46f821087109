"""What a schedule takes: costs, simulated and measured timelines, lower bounds."""
