#pragma once
/* Removes a folder and everything below it, if it exists. Follows no link: a hostile program may have made the contents. */
int remove_folder(const char *path);
