#ifndef FOLDER_H
#define FOLDER_H
/* Remove a folder and all below it; it may not be there. No link is followed, whatever a program made of it. */
int remove_folder(const char *path);
#endif
