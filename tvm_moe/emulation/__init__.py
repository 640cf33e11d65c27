"""AArch64 on another machine, under qemu-user: its Python, and what it executes (`plugin`, `counting`, `classes`)."""
