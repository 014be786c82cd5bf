"""The subcommands of `paceline`, one module each. `main` imports a module only when its command runs."""
