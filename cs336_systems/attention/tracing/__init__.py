"""What functions of a pair compute: recorded (`record`), as an expression (`graph`), as a rule's text (`source`)."""
