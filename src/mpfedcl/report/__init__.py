"""Tables, figures and the HTML report for people."""
