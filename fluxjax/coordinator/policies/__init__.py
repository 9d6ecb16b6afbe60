"""What happens when: one policy a file, and what policies consult."""
