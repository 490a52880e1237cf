"""ftrun: torchrun's flags, but only the worker that failed is started again."""
