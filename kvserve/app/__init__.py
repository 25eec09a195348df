"""The process: start and end, which model is loaded, made or swapped, what each package is given. It imports every
package and nothing imports it. Importing this name alone loads nothing."""
