"""A run: the driver ships a plan, launches and watches the workers, and collects their result."""
