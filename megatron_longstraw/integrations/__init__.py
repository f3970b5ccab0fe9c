"""How hosts take the schedule. Nothing is changed until a function here is called."""
