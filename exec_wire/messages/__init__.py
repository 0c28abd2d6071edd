"""Every message that crosses a process boundary, by subject. Each is declared once."""
